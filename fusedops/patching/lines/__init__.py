"""Sites that are recognised by reading the lines of a module's forward."""
