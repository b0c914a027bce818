//! Expands `print!` and `println!`. Rust's format string becomes one for CUDA's printf, which
//! formats on the host, so that a kernel needs no stack and no code for formatting.

use proc_macro2::TokenStream;
use quote::quote;
use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::{Error, Expr, Ident, LitStr, Result, Token};

/// The arguments of the macro: `"text {} {name}", value`.
pub struct Print {
    format: LitStr,
    values: Vec<Expr>,
}

impl Parse for Print {
    fn parse(input: ParseStream) -> Result<Self> {
        if input.is_empty() {
            return Ok(Self { format: LitStr::new("", input.span()), values: vec![] });
        }
        let format = input.parse()?;
        if !input.is_empty() {
            input.parse::<Token![,]>()?;
        }
        let values = Punctuated::<Expr, Token![,]>::parse_terminated(input)?;
        Ok(Self { format, values: values.into_iter().collect() })
    }
}

impl Print {
    /// Returns the call that prints the text, followed by `end`.
    pub fn expand(self, end: &str) -> Result<TokenStream> {
        let Self { format, values } = self;
        let (mut pieces, arguments) = parse(&format, values)?;
        if let Some(last) = pieces.last_mut() {
            last.push_str(end);
        }
        Ok(quote! {{
            struct __Pieces;
            impl ::cuda_std::io::Pieces for __Pieces {
                const PIECES: &'static [&'static str] = &[#(#pieces),*];
            }
            ::cuda_std::io::print::<__Pieces, _>((#(#arguments,)*));
        }})
    }
}

/// Returns the text before, between and after the arguments, and the arguments in the order of
/// their use.
fn parse(format: &LitStr, values: Vec<Expr>) -> Result<(Vec<String>, Vec<Expr>)> {
    let text = format.value();
    let mut values = values.into_iter();
    let (mut pieces, mut arguments) = (vec![String::new()], vec![]);
    let error = |text: &str| Error::new(format.span(), text);
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '{' | '}' if chars.peek() == Some(&c) => {
                chars.next();
                push(&mut pieces, c);
            }
            '{' if !chars.clone().any(|c| c == '}') => {
                return Err(error("a `{` has no `}`: write `{{` for the character"));
            }
            '{' => {
                let name: String = chars.by_ref().take_while(|c| *c != '}').collect();
                let name = name.trim();
                let name = name.strip_suffix(":?").unwrap_or(name);
                if name.is_empty() {
                    let value = values.next().ok_or_else(|| error("a `{}` has no value"))?;
                    arguments.push(value);
                } else {
                    // As in Rust's own format strings, a raw identifier is no name.
                    let ident =
                        syn::parse_str::<Ident>(name).ok().filter(|_| !name.starts_with("r#"));
                    let mut ident = ident.ok_or_else(|| {
                        error("device printing knows `{}` and `{name}` only, no format options")
                    })?;
                    ident.set_span(format.span());
                    arguments.push(syn::parse_quote!(#ident));
                }
                pieces.push(String::new());
            }
            '}' => return Err(error("a `}` has no `{`: write `}}` for the character")),
            c => push(&mut pieces, c),
        }
    }
    match values.next() {
        Some(value) => Err(Error::new_spanned(value, "this value has no `{}`")),
        None => Ok((pieces, arguments)),
    }
}

fn push(pieces: &mut [String], c: char) {
    if let Some(last) = pieces.last_mut() {
        last.push(c);
    }
}

#[cfg(test)]
mod tests {
    use proc_macro2::Span;
    use syn::LitStr;

    #[test]
    fn a_name_in_braces_is_an_identifier_and_no_raw_one() {
        let parse = |text: &str| super::parse(&LitStr::new(text, Span::call_site()), vec![]);
        let (pieces, arguments) = parse("a {name} b {other:?}").unwrap();
        assert_eq!((pieces.concat().as_str(), arguments.len()), ("a  b ", 2));
        for name in ["r#type", "r#name", "type", "a b", "1", "name:x"] {
            let error = parse(&format!("{{{name}}}")).err().unwrap().to_string();
            assert!(error.starts_with("device printing knows"), "{name}: {error}");
        }
    }
}
