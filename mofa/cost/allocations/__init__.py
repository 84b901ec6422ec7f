"""What a rank allocates, op by op and tensor by tensor, as the replay plays it."""
