"""How fast a model runs on this machine: what is measured, how, and its pictures."""
