"""The experiments that fill an Evidence. Nothing here judges what it measures."""
