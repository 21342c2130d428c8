"""What a run shows: where its time went, what it holds, how it learns. Free of Lightning."""
