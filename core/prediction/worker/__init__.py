"""Work in processes of low priority beside the engine: how they are started, and what is said to them."""
