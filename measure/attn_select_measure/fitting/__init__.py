"""Models of time are fitted here; core only reads them."""
