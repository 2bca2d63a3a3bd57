"""Studies: ladder, price, launching, result tables, selection of runs."""
