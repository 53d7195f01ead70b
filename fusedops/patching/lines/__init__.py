"""Sites recognised by reading the lines of a module's forward."""
