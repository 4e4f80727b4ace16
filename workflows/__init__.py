"""What runs, in what order: the workflows authored with Hera, and the command line."""
