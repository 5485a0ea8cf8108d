"""The admin API: its routes and HTTP server, and the operations behind them."""
