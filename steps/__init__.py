"""One entry point per node of the workflow: ``python -m steps.<name>``."""
