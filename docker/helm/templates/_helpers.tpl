{{- define "graphstash.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | replace "." "-" | trunc 50 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | replace "." "-" | trunc 50 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{- define "graphstash.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "graphstash.labels" -}}
{{ include "graphstash.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "graphstash.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "graphstash.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "graphstash.name" .) }}
{{- end -}}

{{/* What servers and the migration have in common. The user is the image's, which owns its data. */}}
{{- define "graphstash.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "graphstash.containerSecurity" -}}
readOnlyRootFilesystem: true
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "graphstash.env" -}}
- name: GRAPHSTASH_DATABASE_URL
  valueFrom:
    secretKeyRef:
      name: {{ required "set database.secret to the name of a Secret with the URL of PostgreSQL" .Values.database.secret | quote }}
      key: {{ .Values.database.key | quote }}
{{- $chosen := dict
    "GRAPHSTASH_HOST" (ternary "::" "0.0.0.0" .Values.ipv6)
    "GRAPHSTASH_PORT" "8077"
    "GRAPHSTASH_AUTO_MIGRATE" "false"
    "GRAPHSTASH_WORKERS" .Values.workers
    "GRAPHSTASH_SHUTDOWN_SECONDS" .Values.shutdownSeconds
    "GRAPHSTASH_DATA_DIR" "/var/lib/graphstash/data"
    "GRAPHSTASH_BLOB_STORE" .Values.blobs.store -}}
{{- if ne .Values.blobs.store "disk" -}}
{{- $names := dict "s3" "GRAPHSTASH_S3_BUCKET" "gcs" "GRAPHSTASH_GCS_BUCKET" "azure" "GRAPHSTASH_AZURE_CONTAINER" -}}
{{- $_ := set $chosen (get $names .Values.blobs.store) (required "set blobs.bucket to the bucket of the artifacts, or blobs.store to disk" .Values.blobs.bucket) -}}
{{- if and (eq .Values.blobs.store "azure") (not (hasKey .Values.settings "AZURE_STORAGE_ACCOUNT_NAME")) -}}
{{- fail "set settings.AZURE_STORAGE_ACCOUNT_NAME to the account of the container" -}}
{{- end -}}
{{- $_ := set $chosen "GRAPHSTASH_TIER_LIMIT_BYTES" .Values.blobs.tier.limit -}}
{{- end -}}
{{- range $name, $value := .Values.settings -}}
{{- if hasKey $chosen $name -}}
{{- fail (printf "settings.%s: the chart sets this variable itself, from another value" $name) -}}
{{- end -}}
{{- if hasPrefix "GRAPHSTASH_TLS_" $name -}}
{{- fail (printf "settings.%s: the probes and nginx speak plain HTTP in the pod; end TLS at the ingress" $name) -}}
{{- end -}}
{{- if kindIs "map" $value -}}
{{- fail (printf "settings.%s: write the object as JSON in a string, because Helm sorts its names and the server goes by their order" $name) -}}
{{- end -}}
{{- if kindIs "invalid" $value -}}
{{- fail (printf "settings.%s has no value: give one, or leave it out" $name) -}}
{{- end -}}
{{- $_ := set $chosen $name $value -}}
{{- end -}}
{{- range $name, $value := $chosen }}
- name: {{ $name }}
  value: {{ include "graphstash.text" $value | quote }}
{{- end }}
{{- if .Values.blobs.credentialsSecret }}
{{- $keys := dict
    "s3" (list "AWS_ACCESS_KEY_ID" "AWS_SECRET_ACCESS_KEY")
    "azure" (list "AZURE_STORAGE_ACCOUNT_KEY")
    "gcs" list
    "disk" list }}
{{- range get $keys .Values.blobs.store }}
- name: {{ . }}
  valueFrom: {secretKeyRef: {name: {{ $.Values.blobs.credentialsSecret | quote }}, key: {{ . }}}}
{{- end }}
{{- end }}
{{- if include "graphstash.googleSecret" . }}
- {name: GOOGLE_APPLICATION_CREDENTIALS, value: /var/run/secrets/google/credentials.json}
{{- end }}
{{- end -}}

{{/* Google's libraries read a key from a file. */}}
{{- define "graphstash.googleSecret" -}}
{{- if eq .Values.blobs.store "gcs" }}{{ .Values.blobs.credentialsSecret }}{{ end -}}
{{- end -}}

{{/* Numbers of values files are floating point: 1000000 would become 1e+06. */}}
{{- define "graphstash.text" -}}
{{- if kindIs "string" . -}}{{ . }}
{{- else -}}{{ . | toJson }}
{{- end -}}
{{- end -}}

{{- define "graphstash.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: data, mountPath: /var/lib/graphstash}
{{- if include "graphstash.googleSecret" . }}
- {name: google, mountPath: /var/run/secrets/google, readOnly: true}
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "graphstash.volumes" -}}
- name: tmp
  emptyDir: {sizeLimit: 64Mi}
- name: data
{{- if eq .Values.blobs.store "disk" }}
  persistentVolumeClaim:
    claimName: {{ required "set blobs.claim to a PersistentVolumeClaim that all servers can mount (ReadWriteMany), or blobs.store to s3, gcs or azure" .Values.blobs.claim | quote }}
{{- else if .Values.blobs.tier.storageClass }}
  ephemeral:
    volumeClaimTemplate:
      spec:
        accessModes: [ReadWriteOnce]
        storageClassName: {{ .Values.blobs.tier.storageClass | quote }}
        resources: {requests: {storage: {{ .Values.blobs.tier.size }}}}
{{- else }}
  emptyDir: {sizeLimit: {{ .Values.blobs.tier.size }}}
{{- end }}
{{- with include "graphstash.googleSecret" . }}
- name: google
  secret: {secretName: {{ . | quote }}, defaultMode: 0440}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
