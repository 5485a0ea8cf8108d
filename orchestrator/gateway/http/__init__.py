"""HTTP/1.1 on asyncio: connections, exchanges, listening sockets."""
