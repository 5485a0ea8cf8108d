"""Which request goes next and to which replica: fair queue, predicted waits, headroom, prefix index. Pure."""
