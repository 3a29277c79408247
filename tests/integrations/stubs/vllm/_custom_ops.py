rotary_embedding = None
