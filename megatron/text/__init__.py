"""Raw text to .bin/.idx datasets: readers, preprocessing jobs, shards, joining, subsets, downloads."""
