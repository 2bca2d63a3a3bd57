"""Arguments, scripts, files and names of other systems, and what replaces them here."""
