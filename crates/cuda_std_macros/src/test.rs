//! `#[devcomm::test]`: a test that runs on every rank.

use proc_macro2::TokenStream;
use quote::quote;
use syn::parse::{Parse, ParseStream};
use syn::{Error, Ident, ItemFn, LitInt, LitStr, Result, ReturnType, Token};

/// The arguments of the attribute: the text form of the simulated machine's settings.
pub struct TestArgs {
    settings: String,
}

impl Parse for TestArgs {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        let (mut ranks, mut simulate) = (None, String::new());
        while !input.is_empty() {
            let name: Ident = input.parse()?;
            input.parse::<Token![=]>()?;
            if name == "ranks" {
                let number: LitInt = input.parse()?;
                ranks = Some(number.base10_parse::<usize>()?);
            } else if name == "simulate" {
                simulate = format!(",{}", input.parse::<LitStr>()?.value());
            } else {
                let text = format!("no argument `{name}`: there are `ranks` and `simulate`");
                return Err(Error::new(name.span(), text));
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        match ranks {
            Some(ranks) => Ok(Self { settings: format!("{ranks}{simulate}") }),
            None => Err(input.error("the number of ranks is missing: `ranks = 4`")),
        }
    }
}

/// Expands `#[devcomm::test(args)] function`.
pub fn expand(args: &TestArgs, function: &ItemFn) -> Result<TokenStream> {
    let ItemFn { attrs, sig, block, .. } = function;
    if let Some(token) = &sig.asyncness {
        return Err(Error::new_spanned(token, "a test on ranks cannot be async"));
    }
    if !sig.generics.params.is_empty() {
        return Err(Error::new_spanned(&sig.generics, "a test on ranks cannot be generic"));
    }
    if sig.inputs.len() != 1 {
        return Err(Error::new_spanned(
            &sig.ident,
            "a test on ranks has one parameter: `rank: &Rank`",
        ));
    }
    let (name, settings) = (&sig.ident, &args.settings);
    let body = match sig.output {
        ReturnType::Type(..) => quote!(#name),
        ReturnType::Default => quote! {
            |rank: &::devcomm::Rank| {
                #name(rank);
                ::core::result::Result::<(), ::devcomm::Error>::Ok(())
            }
        },
    };
    Ok(quote! {
        #[::core::prelude::v1::test]
        #(#attrs)*
        fn #name() {
            #sig #block
            ::devcomm::host::run_test(
                ::core::concat!(::core::module_path!(), "::", ::core::stringify!(#name)),
                #settings,
                #body,
            );
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(text: &str) -> Result<TestArgs> {
        syn::parse_str(text)
    }

    #[test]
    fn the_arguments_are_the_text_form_of_the_settings() {
        let settings = |text| args(text).unwrap().settings;
        assert_eq!(settings("ranks = 4"), "4");
        assert_eq!(
            settings("ranks = 4, simulate = \"team=2,network=rail\","),
            "4,team=2,network=rail"
        );
        for (bad, why) in [
            ("", "the number of ranks is missing"),
            ("rank = 4", "no argument `rank`"),
            ("ranks = \"4\"", "integer literal"),
        ] {
            let refusal = args(bad).map(|_| ()).unwrap_err().to_string();
            assert!(refusal.contains(why), "{refusal}");
        }
    }

    #[test]
    fn a_function_that_is_no_test_is_refused() {
        let refusal = |function: &str| {
            let function = syn::parse_str(function).unwrap();
            expand(&args("ranks = 2").unwrap(), &function).unwrap_err().to_string()
        };
        assert!(refusal("fn f() {}").contains("one parameter"));
        assert!(refusal("async fn f(rank: &Rank) {}").contains("async"));
        assert!(refusal("fn f<T>(rank: &Rank) {}").contains("generic"));
    }
}
