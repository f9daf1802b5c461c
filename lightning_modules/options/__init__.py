"""Options as they are read: safe YAML, paths, types, classes of users, messages, the help screen."""
