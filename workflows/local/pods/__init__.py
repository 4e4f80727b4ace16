"""Pods as processes of this machine: one small supervisor per task, forked from one warm parent."""
