"""The frame and the looks of a report: light and dark by the reader's own setting, and on paper."""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="color-scheme" content="light dark"><title>{title}</title><style>{style}</style></head>
<body><main>{body}</main></body></html>
"""
STYLE = """
:root{--page:#fff;--ink:#1d2129;--dim:#667;--line:#dfe3e8;--soft:#f5f7f9;
--c0:#2f6fb2;--c1:#c4622d;--c2:#3a8a55;--c3:#8a5bb0;--c4:#b03a5b;--c5:#7a6a20;--faint:#8a8f98}
@media (prefers-color-scheme:dark){:root{--page:#15181c;--ink:#e6e8eb;--dim:#9aa3ad;--line:#2d333b;--soft:#1c2127;
--c0:#6aa9e9;--c1:#eb9463;--c2:#74c48d;--c3:#bd94e0;--c4:#e57f9c;--c5:#cbb75c;--faint:#7d858f}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1040px;margin:0 auto;padding:32px 20px}
h1{font-size:26px;margin:0 0 16px}h2{font-size:20px;margin:40px 0 4px}h3{font-size:16px;margin:22px 0 8px}
small,footer,dl,section>p,.tick,.legend{color:var(--dim)}small{font-weight:400}
section>p{margin:0 0 12px}a{color:var(--c0)}footer{margin-top:40px;font-size:13px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:14px}
th,td{padding:4px 12px 4px 0;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{font-weight:600;color:var(--dim)}.left{text-align:left}
.map td,.map th{padding:6px 12px;text-align:center;border:2px solid var(--page)}
.charts{display:flex;flex-wrap:wrap;gap:8px 24px}
figure{margin:8px 0;flex:1 1 min(380px,100%);min-width:0;max-width:490px}figure.wide{max-width:none;flex-basis:auto}
figcaption{font-weight:600;font-size:14px}
svg{width:100%;height:auto;display:block}
.tick{font-size:11px;fill:var(--dim)}.grid{stroke:var(--line)}.mark{stroke:var(--ink);stroke-dasharray:4 4;opacity:.6}
polyline{fill:none;stroke:currentColor;stroke-width:2}circle{fill:currentColor}
.s0{color:var(--c0)}.s1{color:var(--c1)}.s2{color:var(--c2)}.s3{color:var(--c3)}.s4{color:var(--c4)}.s5{color:var(--c5)}
.faint{color:var(--faint)}.faint polyline{stroke-dasharray:6 3}
.legend{margin:0;font-size:13px}.legend span{margin-right:14px}
.legend b{display:inline-block;width:14px;height:3px;background:currentColor;vertical-align:middle;margin-right:6px}
.bar{display:inline-block;width:80px;height:8px;background:var(--line);margin-right:8px;border-radius:4px;overflow:hidden}
.bar+span{display:inline-block;min-width:3em}
.bar b{display:block;height:100%;background:var(--c0)}
dl{display:grid;grid-template-columns:auto 1fr;gap:2px 12px;margin:10px 0;font-size:12.5px}
dt{font-weight:600}dd{margin:0;overflow-wrap:anywhere}dd b{font-weight:500;color:var(--ink)}
img{max-width:100%;background:#fff;border-radius:4px;margin:8px 0}
summary{cursor:pointer;font-size:13px;color:var(--dim)}
@media print{:root{--page:#fff;--ink:#000;--dim:#444;--line:#ccc;--c0:#2f6fb2;--c1:#c4622d;--c2:#3a8a55;--c3:#8a5bb0;
--c4:#b03a5b;--c5:#7a6a20;--faint:#777}body{font-size:11pt}main{max-width:none;padding:0}
table{font-size:8.5pt}th,td{padding-right:8px}figure{flex-basis:45%}
figure,tr,article h3{break-inside:avoid}h2,h3{break-after:avoid}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}details:not([open]){display:none}.scroll{overflow:visible}}
"""
