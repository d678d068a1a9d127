"""Write configs/grafana/sits2026.json. Panels are rows of one table, so that the dashboard stays even and reviewable."""
import json
import pathlib


def quantiles(name):
    buckets = f'sum by (le) (rate(sits2026:{name}_bucket{{model_name=~"$model"}}[$__rate_interval]))'
    return [(f"histogram_quantile({q}, {buckets})", f"p{q * 100:g}") for q in (0.5, 0.9, 0.99)]


def rate(name, legend, by=""):
    return [(f"sum {f'by ({by}) ' if by else ''}(rate(sits2026:{name}{{model_name=~\"$model\"}}[$__rate_interval]))", legend)]


def gauge(name, legend):
    return [(f"sum (sits2026:{name}{{model_name=~\"$model\"}})", legend)]


PANELS = [
    ("Time to first token", "s", quantiles("time_to_first_token_seconds")),
    ("Inter-token latency", "s", quantiles("inter_token_latency_seconds")),
    ("Tokens per second", "short", rate("generation_tokens_total", "output") + rate("prompt_tokens_total", "prompt")),
    ("Requests", "short", gauge("num_requests_running", "running") + gauge("num_requests_waiting", "waiting")),
    ("KV cache in use", "percentunit", [('max (sits2026:kv_cache_usage_perc{model_name=~"$model"})', "pages")]),
    ("Prefix cache, tokens per second", "short", rate("prefix_cache_hits_total", "hits") + rate("prefix_cache_queries_total", "asked")),
    ("Queue time", "s", quantiles("request_queue_time_seconds")),
    ("Prefill time", "s", quantiles("request_prefill_time_seconds")),
    ("Decode time", "s", quantiles("request_decode_time_seconds")),
    ("Finished requests", "reqps", rate("request_success_total", "{{finished_reason}}", "finished_reason")),
    ("Rejections and preemptions", "reqps", rate("admission_rejections_total", "rejected") + rate("num_preemptions_total", "preempted")),
    ("Delivery after the engine", "s", quantiles("delivery_latency_seconds")),
    ("Mean time by stage", "s",
     [('sum by (stage) (rate(sits2026:request_stage_seconds_sum{model_name=~"$model"}[$__rate_interval]))'
       ' / sum by (stage) (rate(sits2026:request_stage_seconds_count{model_name=~"$model"}[$__rate_interval]))', "{{stage}}")]),
    ("Output tokens per second by tenant", "short", rate("tenant_generation_tokens_total", "{{tenant}}", "tenant")),
    ("Requests by class", "reqps", rate("class_requests_total", "{{class}}", "class")),
    ("KV pages", "short", [('sum by (codec, state) (sits2026:kv_pool_pages{model_name=~"$model"})', "{{codec}} {{state}}")]),
    ("Memory of the process", "bytes", [("sum by (instance) (process_resident_memory_bytes)", "{{instance}}")]),
    ("Audit lines and spans lost", "short", rate("audit_lines_lost_total", "audit lines") + rate("trace_spans_dropped_total", "spans")),
]


def panel(number, title, unit, targets):
    return {
        "id": number + 1, "type": "timeseries", "title": title, "datasource": {"type": "prometheus", "uid": "prometheus"},
        "gridPos": {"x": number % 3 * 8, "y": number // 3 * 8, "w": 8, "h": 8},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [{"refId": chr(65 + i), "expr": expr, "legendFormat": legend} for i, (expr, legend) in enumerate(targets)],
    }


def main():
    board = {
        "uid": "sits2026", "title": "sits2026", "schemaVersion": 39, "refresh": "10s", "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [{"name": "model", "type": "query", "datasource": {"type": "prometheus", "uid": "prometheus"},
                                 "query": "label_values(sits2026:num_requests_running, model_name)", "includeAll": True, "allValue": ".*",
                                 "current": {"text": "All", "value": "$__all"}}]},
        "panels": [panel(i, *row) for i, row in enumerate(PANELS)],
    }
    pathlib.Path(__file__).with_name("sits2026.json").write_text(json.dumps(board, indent=1) + "\n")


if __name__ == "__main__":
    main()
