package inbox

// Option configures a store.
type Option func(*options)

type options struct{ schema string }

// Schema says where the tables are; the default is the connection's search_path.
func Schema(name string) Option { return func(o *options) { o.schema = name } }

func applyOptions(opts []Option) options {
	var o options
	for _, f := range opts {
		f(&o)
	}
	return o
}
