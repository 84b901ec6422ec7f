"""What a search or an estimate returns: result types and the JSON contract."""
