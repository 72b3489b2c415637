module github.com/verdict-proxy/verdict

go 1.26
