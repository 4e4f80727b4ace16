"""The local engine: runs compiled Argo workflows on this machine."""
