"""What the notebooks show: a trained model and a piece of text, and tables and pictures made of them."""
