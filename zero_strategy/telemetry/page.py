"""The frame of `report.html`: what stays the same from run to run."""

# Braces of the style sheet are doubled for str.format.
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title} - run report</title>
<style>
:root {{
  --paper: #fbfbfa; --card: #ffffff; --ink: #1d1f23; --muted: #666c76; --grid: #e6e7ea;
  --blue: #2b68d8; --amber: #cf7a0a; --teal: #0b8a7c; --violet: #7d4fc4; --rose: #cc3b63;
  --slate: #8a93a2;
}}
@media (prefers-color-scheme: dark) {{
  :root {{
    --paper: #14161a; --card: #1b1e23; --ink: #e7e9ec; --muted: #9aa1ad; --grid: #2c313a;
    --blue: #74a5ff; --amber: #f0a24a; --teal: #45c4b3; --violet: #b793f2; --rose: #f47d9b;
    --slate: #7f8998;
  }}
}}
* {{ box-sizing: border-box; }}
body {{
  margin: 0 auto; padding: 2.5rem 1.5rem 4rem; max-width: 74rem;
  background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  font-variant-numeric: tabular-nums;
}}
h1 {{ font-size: 1.9rem; line-height: 1.2; margin: 0; letter-spacing: -0.01em; }}
h2 {{ font-size: 1.2rem; margin: 2.5rem 0 0.9rem; }}
h3 {{ font-size: 0.95rem; margin: 0; font-weight: 600; }}
small {{ color: var(--muted); font-weight: 400; font-size: 0.8rem; margin-left: 0.35em; }}
p {{ margin: 0.3rem 0; }}
header p {{ color: var(--muted); }}
dl {{
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 12rem), 1fr));
  gap: 0.7rem; margin: 1.75rem 0 0;
}}
dl div, figure {{
  background: var(--card); border: 1px solid var(--grid); border-radius: 10px;
}}
dl div {{ padding: 0.7rem 0.9rem; }}
dt {{ color: var(--muted); font-size: 0.82rem; }}
dd {{ margin: 0; font-size: 1.3rem; font-weight: 600; white-space: nowrap; }}
section {{
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); gap: 1rem;
}}
figure {{ margin: 0; padding: 0.9rem 1rem 0.6rem; align-self: start; }}
figure ul {{
  list-style: none; display: flex; flex-wrap: wrap; gap: 0.1rem 1.1rem;
  margin: 0.25rem 0 0.6rem; padding: 0; color: var(--muted); font-size: 0.82rem;
}}
figure b {{ color: var(--ink); font-weight: 600; }}
figure i {{
  display: inline-block; width: 0.7em; height: 0.7em; border-radius: 2px; margin-right: 0.4em;
}}
svg {{ display: block; width: 100%; height: auto; overflow: hidden; }}
svg .grid line {{ stroke: var(--grid); }}
svg .grid text {{ fill: var(--muted); font-size: 11px; }}
svg .line {{ fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }}
</style>
</head>
<body>
<header><h1>{title}</h1><p>{subtitle}</p></header>
<main>
<dl>{tiles}</dl>
<h2>Learning</h2><section>{learning}</section>
<h2>Speed</h2><section>{speed}</section>
{tiers}<h2>Memory</h2><section>{memory}</section>
<h2>Health</h2><section>{health}</section>
</main>
</body>
</html>
"""
