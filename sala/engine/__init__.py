"""The engine, without tensors: request preparation, the engine service, scheduling, prefix cache, sessions."""
