"""How new weights travel from the trainer to the engines, and how it is proved that they arrived."""
