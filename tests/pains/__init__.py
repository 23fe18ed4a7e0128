"""What goes wrong with stock PyTorch, and what happens instead here, side by side.

Each test first shows the failure of stock torch, through the `stock_fails` fixture, and then our result.
"""
