//! The arguments of `#[kernel(..)]`.

use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::{Error, GenericArgument, Ident, LitStr, Result, Token, bracketed};

/// `T = [f32, f16], N = [4, 8], arch = "sm_90a"`.
#[derive(Default)]
pub struct KernelArgs {
    /// The values of each generic parameter.
    pub lists: Vec<(Ident, Vec<GenericArgument>)>,
    /// The architecture that the kernel needs.
    pub arch: Option<LitStr>,
}

impl Parse for KernelArgs {
    fn parse(input: ParseStream) -> Result<Self> {
        let mut args = Self::default();
        while !input.is_empty() {
            let name: Ident = input.parse()?;
            input.parse::<Token![=]>()?;
            if name == "arch" {
                args.set_arch(name, input.parse()?)?;
            } else {
                let list;
                bracketed!(list in input);
                let values = Punctuated::<GenericArgument, Token![,]>::parse_terminated(&list)?;
                if values.is_empty() {
                    return Err(Error::new(name.span(), format!("list at least one `{name}`")));
                }
                if args.lists.iter().any(|(listed, _)| *listed == name) {
                    return Err(Error::new(name.span(), format!("`{name}` is listed twice")));
                }
                args.lists.push((name, values.into_iter().collect()));
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        Ok(args)
    }
}

impl KernelArgs {
    fn set_arch(&mut self, name: Ident, arch: LitStr) -> Result<()> {
        if self.arch.is_some() {
            return Err(Error::new(name.span(), "`arch` is given twice"));
        }
        let text = arch.value();
        let digits = text.strip_prefix("sm_").unwrap_or_default().trim_end_matches(['a', 'f']);
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(Error::new(
                arch.span(),
                "an architecture reads like \"sm_90\" or \"sm_90a\"",
            ));
        }
        self.arch = Some(arch);
        Ok(())
    }
}
