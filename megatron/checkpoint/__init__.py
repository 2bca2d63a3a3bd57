"""What a run can go on from: written whole, verified on reading."""
