"""Mixed load with faults against a real server: nothing is lost, nothing leaks, and no answer changes."""
