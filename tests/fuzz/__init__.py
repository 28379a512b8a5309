"""`make fuzz`: hostile images, tables, recipes, options, run directories, weights, archives, names, places, signals and
kills, each through the command line as a user would run it. docs/reliability.md says what counts and how to run it."""
