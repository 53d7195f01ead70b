"""Tests that memory does not grow over repeated calls or within one."""
