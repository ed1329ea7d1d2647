"""mtfunc."""
