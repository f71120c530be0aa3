"""How something is proven of a model: samples, what they evaluate to, and checks at every length."""
