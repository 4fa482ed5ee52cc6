"""The dashboard: pages for people at `/`, rendered here, that need no script.

Pages show what the same caller could ask of the API, and change nothing but the browser's own
session. As the calls do, they ask services and know neither SQL nor files.

    routes      which page is where, and what becomes of a refusal
    visitor     who looks: by a session's cookie, a token, or nobody
    sign_in     the form, the cookie, and what protects both
    overview artifact job search reference      what each page says
    charts rendering words                      how it is drawn, filled in and written
"""
