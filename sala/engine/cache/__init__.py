"""Who owns which page and which slot. `hybrid` is the only door."""
