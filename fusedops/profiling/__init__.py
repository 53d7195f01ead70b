"""Where the time of a step goes, and how it is measured."""
