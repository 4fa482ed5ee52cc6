"""The dashboard: pages for people at `/`, rendered on the server.

Pages show only what the same caller could request from the API. Like the calls, they use services,
and access neither SQL nor files.

    routes      maps paths to pages, and turns refusals into pages
    visitor     who views a page: by a session's cookie, by a token, or anonymous
    sign_in     the form, the cookie, and what protects both
    actions     forms that change something, with the rights of the calls that do the same
    overview artifact job search audit tokens reference      content of each page
    charts rendering words                      drawing, templates and formatting
"""
