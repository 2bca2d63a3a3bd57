"""Colours of the report, for light and dark themes, and their names in text and figures ("var(--size0)").

The page declares the names as CSS variables, and its script replaces them in the figures, so that both
follow the theme of the screen.

Sizes and budgets are ordered, so their colours are a ramp of monotone lightness, which shows the order in
print and without colour vision. Each theme uses the part of the ramp that contrasts with its background.
Unordered categories (objectives) differ by dash and symbol, never by colour alone.
"""

RAMPS: dict[str, dict[str, tuple[str, ...]]] = {  # light theme: dark to medium; dark theme: medium to light
    "size": {
        "light": ("#1b0a8c", "#6a00a8", "#b12a90", "#d9512f", "#b57a00"),
        "dark": ("#9a6cff", "#d65fc4", "#f2727a", "#fba05a", "#f5e05a"),
    },
    "budget": {
        "light": ("#0b2f66", "#14639c", "#1f8f96", "#5fa052"),
        "dark": ("#5b9bf0", "#45bcd2", "#63d3a6", "#c6e58a"),
    },
}
THEMES = {
    "light": {
        "ink": "#1d2330",
        "muted": "#5b6475",
        "grid": "#e4e7ec",
        "paper": "#ffffff",
        "page": "#f6f7f9",
        "care": "#c77700",
        "accent": "#0b62b0",
    },
    "dark": {
        "ink": "#e8eaf0",
        "muted": "#a3abba",
        "grid": "#2b313d",
        "paper": "#171b23",
        "page": "#0f1218",
        "care": "#e5a13a",
        "accent": "#62b0f5",
    },
}
TRANSLUCENT = {  # name: (colour of THEMES, opacity)
    "band": ("accent", 0.18),  # intervals
    "cloud": ("accent", 0.45),  # many points
    "shade": ("ink", 0.06),  # extrapolation
    "label": ("paper", 0.75),  # background of text on lines
}
INK, MUTED, GRID, PAPER, ACCENT = (f"var(--{name})" for name in ("ink", "muted", "grid", "paper", "accent"))
BAND, CLOUD, SHADE, LABEL = (f"var(--{name})" for name in TRANSLUCENT)


def make_palette(
    n_sizes: int, n_budgets: int, n_domains: int = 0, n_slices: int = 0
) -> dict[str, dict[str, str]]:
    """Return {theme: {colour name: #rrggbb}}, with size0..size<n-1> along the ramp of sizes.

    Likewise budget0.. (of tokens), domain0.. and slice0.. (budgets of FLOPs). TRANSLUCENT ones are rgba().
    """
    colours = {}
    for theme, named in THEMES.items():
        ramps = {"size": ("size", n_sizes), "budget": ("budget", n_budgets), "domain": ("size", n_domains)}
        ramps |= {"slice": ("budget", n_slices)}
        along = {
            f"{name}{i}": interpolate_ramp(RAMPS[ramp][theme], i, n)
            for name, (ramp, n) in ramps.items()
            for i in range(n)
        }
        thin = {name: make_translucent(named[of], alpha) for name, (of, alpha) in TRANSLUCENT.items()}
        colours[theme] = named | thin | along
    return colours


def make_translucent(colour: str, alpha: float) -> str:
    """Return #rrggbb as rgba() with opacity `alpha`."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def interpolate_ramp(ramp: tuple[str, ...], i: int, n: int) -> str:
    """Return colour i of n, evenly spaced from the first to the last colour of the ramp."""
    # position on the ramp in units of its segments; linear interpolation of each sRGB channel
    # the middle of the ramp for a single colour
    at = (len(ramp) - 1) * (i / (n - 1) if n > 1 else 0.5)
    # Example: ramp of 5 colours, i = 2 of n = 4: at = 4 x 2/3 = 2.67, between colours 2 and 3, 67 % of the
    # latter. The min keeps the last colour in the last segment, where `at` is len - 1.
    left = min(int(at), len(ramp) - 2)
    below, above = ([int(ramp[k][c : c + 2], 16) for c in (1, 3, 5)] for k in (left, left + 1))
    mixed = [round(b + (a - b) * (at - left)) for b, a in zip(below, above, strict=True)]
    return "#" + "".join(f"{channel:02x}" for channel in mixed)
