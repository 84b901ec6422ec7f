"""torchtitan: a layer and FSDP2 around it, a file a part."""
