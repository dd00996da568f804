{{- define "oubliette.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "oubliette.selector" -}}
app.kubernetes.io/name: oubliette
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "oubliette.labels" -}}
{{ include "oubliette.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "oubliette.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "oubliette.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "oubliette.name" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "oubliette.claim" -}}
{{- default (printf "%s-workspaces" (include "oubliette.name" .)) .Values.workspaces.existingClaim -}}
{{- end -}}

{{- define "oubliette.tlsSecret" -}}
{{- default (printf "%s-tls" (include "oubliette.name" .)) .Values.tls.existingSecret -}}
{{- end -}}

{{- define "oubliette.keySecret" -}}
{{- default (printf "%s-cluster-key" (include "oubliette.name" .)) .Values.clusterKey.existingSecret -}}
{{- end -}}

{{/* Service of which each server has a name of its own. */}}
{{- define "oubliette.serversService" -}}
{{- printf "%s-servers" (include "oubliette.name" .) -}}
{{- end -}}
