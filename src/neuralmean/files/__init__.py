"""Files: written atomically, and read without trusting them."""
