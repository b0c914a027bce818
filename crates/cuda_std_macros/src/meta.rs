//! Describes a kernel to `cuda_builder`: a JSON record in a static of section `.devcomm.kernel`.

use proc_macro2::{TokenStream, TokenTree};
use quote::{ToTokens, quote};
use syn::{Ident, LitStr, Type};

/// The package and the source file of a kernel.
pub struct Source {
    /// The package.
    pub package: String,
    /// Stem of the file, which names the PTX module. For `lib.rs` and `main.rs` the package's name,
    /// for `mod.rs` the folder's.
    pub stem: String,
    /// Whether cargo compiles the package as a dependency: then another one calls its functions,
    /// and it has no entry points of its own.
    pub is_dependency: bool,
}

impl Source {
    /// Returns the source of a macro call; without cargo the package is `kernels`.
    pub fn of(span: proc_macro::Span) -> Self {
        let package = std::env::var("CARGO_PKG_NAME").unwrap_or_else(|_| "kernels".into());
        let set = |name| std::env::var_os(name).is_some();
        let is_dependency = set("CARGO") && !set("CARGO_PRIMARY_PACKAGE");
        Self { stem: stem(&span.file(), &package), package, is_dependency }
    }
}

fn stem(file: &str, package: &str) -> String {
    let path = std::path::Path::new(file);
    let name = |part: Option<&std::ffi::OsStr>| part.and_then(|p| p.to_str()).map(str::to_owned);
    let stem = match name(path.file_stem()).as_deref() {
        None | Some("lib" | "main") => None,
        Some("mod") => name(path.parent().and_then(|folder| folder.file_name())),
        Some(stem) => Some(stem.to_owned()),
    };
    stem.unwrap_or_else(|| package.to_owned()).replace('-', "_")
}

/// The record of one GPU entry point.
pub struct Record<'a> {
    pub entry: &'a str,
    pub source: &'a Source,
    pub arch: Option<&'a LitStr>,
    pub max_threads: Option<u32>,
    pub min_blocks: Option<u32>,
    pub cluster: Option<u32>,
    pub params: Vec<(&'a Ident, String)>,
}

impl Record<'_> {
    /// Returns the static that carries the record.
    pub fn to_static(&self) -> TokenStream {
        let json = self.json();
        let bytes = proc_macro2::Literal::byte_string(json.as_bytes());
        let len = json.len();
        quote! {
            #[used]
            #[unsafe(link_section = ".devcomm.kernel")]
            static META: [u8; #len] = *#bytes;
        }
    }

    fn json(&self) -> String {
        let params: Vec<String> = self
            .params
            .iter()
            .map(|(name, ty)| {
                format!("{{\"name\":{},\"type\":{}}}", quoted(&name.to_string()), quoted(ty))
            })
            .collect();
        let arch = self.arch.map(|arch| format!("\"arch\":{},", quoted(&arch.value())));
        let max_threads = self.max_threads.map(|count| format!("\"max_threads\":{count},"));
        let min_blocks = self.min_blocks.map(|count| format!("\"min_blocks\":{count},"));
        let cluster = self.cluster.map(|count| format!("\"cluster\":{count},"));
        format!(
            "{{\"name\":{},\"package\":{},\"file\":{},{}{}{}{}\"params\":[{}]}}",
            quoted(self.entry),
            quoted(&self.source.package),
            quoted(&self.source.stem),
            arch.unwrap_or_default(),
            max_threads.unwrap_or_default(),
            min_blocks.unwrap_or_default(),
            cluster.unwrap_or_default(),
            params.join(",")
        )
    }
}

/// Returns a JSON string.
fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if c.is_control() => out.push_str(&format!("\\u{:04x}", c as u32)),
            c => out.push(c),
        }
    }
    out + "\""
}

/// Returns a type as source text, with the generic parameters replaced by an instance's values.
pub fn type_text(ty: &Type, values: &[(&Ident, String)]) -> String {
    token_text(ty.to_token_stream(), values)
}

/// Does the same as [`type_text`], for any tokens.
pub fn token_text(tokens: TokenStream, values: &[(&Ident, String)]) -> String {
    let mut out = String::new();
    write_tokens(tokens, values, &mut out);
    out
}

/// Appends the tokens, with a space between words and after a comma or semicolon.
fn write_tokens(tokens: TokenStream, values: &[(&Ident, String)], out: &mut String) {
    let in_word = |c: char| c.is_alphanumeric() || c == '_';
    for token in tokens {
        let text = match token {
            TokenTree::Group(group) => {
                let (open, close) = match group.delimiter() {
                    proc_macro2::Delimiter::Parenthesis => ("(", ")"),
                    proc_macro2::Delimiter::Bracket => ("[", "]"),
                    proc_macro2::Delimiter::Brace => ("{", "}"),
                    proc_macro2::Delimiter::None => ("", ""),
                };
                if open == "[" && out.ends_with(in_word) {
                    out.push(' ');
                }
                out.push_str(open);
                write_tokens(group.stream(), values, out);
                out.push_str(close);
                continue;
            }
            TokenTree::Ident(ident) => values
                .iter()
                .find(|(name, _)| **name == ident)
                .map_or_else(|| ident.to_string(), |(_, value)| value.clone()),
            other => other.to_string(),
        };
        if text.starts_with(in_word) && out.ends_with(|c| in_word(c) || c == ',' || c == ';') {
            out.push(' ');
        }
        out.push_str(&text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_is_named_after_its_file_folder_or_package() {
        assert_eq!(stem("kernels/src/lsa_allreduce.rs", "my-kernels"), "lsa_allreduce");
        assert_eq!(stem("kernels/src/gemm/mod.rs", "my-kernels"), "gemm");
        assert_eq!(stem("kernels/src/lib.rs", "my-kernels"), "my_kernels");
        assert_eq!(stem("", "my-kernels"), "my_kernels");
    }

    #[test]
    fn a_type_is_written_with_the_values_of_its_instance() {
        let name: Ident = syn::parse_quote!(T);
        let values = [(&name, "f16".to_owned())];
        let text = |ty: Type| type_text(&ty, &values);
        assert_eq!(text(syn::parse_quote!(Window<T>)), "Window<f16>");
        assert_eq!(text(syn::parse_quote!(*mut [T; 4])), "*mut [f16; 4]");
        assert_eq!(text(syn::parse_quote!(a::Pair<T, u32>)), "a::Pair<f16, u32>");
    }

    #[test]
    fn a_record_is_the_json_that_the_builder_reads() {
        let name: Ident = syn::parse_quote!(count);
        let arch: LitStr = syn::parse_quote!("sm_90a");
        let source = Source { package: "tests".into(), stem: "fill".into(), is_dependency: false };
        let params = vec![(&name, "usize".to_owned())];
        let record = Record {
            entry: "fill_f32",
            source: &source,
            arch: Some(&arch),
            max_threads: Some(256),
            min_blocks: Some(1),
            cluster: Some(2),
            params,
        };
        let limits = r#""arch":"sm_90a","max_threads":256,"min_blocks":1,"cluster":2,"#;
        let rest = format!(r#"{limits}"params":[{{"name":"count","type":"usize"}}]}}"#);
        assert_eq!(
            record.json(),
            format!(r#"{{"name":"fill_f32","package":"tests","file":"fill",{rest}"#)
        );
    }
}
