"""The small languages inside an Argo workflow: ``{{tags}}``, ``when`` (govaluate), expressions (expr-lang), JSONPath."""
