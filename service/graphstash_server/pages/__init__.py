"""The dashboard: pages for people at `/`, rendered on the server.

Pages show only what the same caller could request from the API, and use only services.

    routes      maps paths to pages, and renders errors
    visitor     who views a page: by a session's cookie, by a token, or anonymous
    sign_in     the form and the cookie
    actions     forms that change something, with the rights of the equivalent calls
    overview artifact job search audit tokens reference      content of each page
    charts rendering words                      drawing, templates and formatting
"""
