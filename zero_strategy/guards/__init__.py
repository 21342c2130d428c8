"""What is watched while a run trains, and acts alike on all ranks."""
