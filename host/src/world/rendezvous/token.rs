//! The job's token: a secret that its ranks have, and strangers do not. Rank 0 and another rank
//! prove to each other that they have it, by keyed hashes of random numbers of both; the token
//! itself is never sent.

use std::fmt;
use std::io;

use hmac::{Hmac, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use super::wire::Hello;

/// A random number that is used once.
pub(crate) type Nonce = [u8; 32];
type Hash = [u8; 32];

/// A job's token.
#[derive(Clone, PartialEq)]
pub(crate) struct Token(Vec<u8>);

/// Rank 0's answer to a [`Hello`] with a nonce.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Challenge {
    pub nonce: Nonce,
    /// Proves that rank 0 has the token.
    pub proof: Hash,
}

/// Who proves.
#[derive(Clone, Copy)]
pub(crate) enum Prover {
    Root = 0,
    Other = 1,
}

impl Token {
    pub(crate) fn new(text: &str) -> Self {
        Self(text.trim().as_bytes().to_vec())
    }

    /// A new token, as text.
    pub(crate) fn random() -> io::Result<String> {
        Ok(nonce()?.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// Proves to the rank that said `hello`, or as this rank, that the prover has the token.
    pub(crate) fn proof(&self, prover: Prover, hello: &Hello, nonce: &Nonce) -> Hash {
        self.hash(prover, hello, nonce).finalize().into_bytes().into()
    }

    /// Whether this is the [`proof`](Self::proof), in a time that does not depend on it.
    pub(crate) fn verify(
        &self,
        prover: Prover,
        hello: &Hello,
        nonce: &Nonce,
        proof: &[u8],
    ) -> bool {
        self.hash(prover, hello, nonce).verify_slice(proof).is_ok()
    }

    fn hash(&self, prover: Prover, hello: &Hello, nonce: &Nonce) -> Hmac<Sha256> {
        let mut hash =
            Hmac::<Sha256>::new_from_slice(&self.0).expect("a key of HMAC may have any length");
        hash.update(&[prover as u8]);
        hash.update(nonce);
        // The hello has the other nonce, the job and the rank.
        hash.update(&serde_json::to_vec(hello).unwrap_or_default());
        hash
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

pub(crate) fn nonce() -> io::Result<Nonce> {
    let mut nonce = Nonce::default();
    getrandom::fill(&mut nonce)?;
    Ok(nonce)
}

#[cfg(test)]
mod tests {
    use super::super::tests::hello;
    use super::*;

    #[test]
    fn a_proof_is_valid_for_its_token_prover_hello_and_nonce_only() {
        let (token, other) = (Token::new("secret\n"), Token::new("secreT"));
        assert_eq!(token, Token::new("secret"));
        let (hello, nonce) = (Hello { nonce: Some([1; 32]), ..hello(1, 2) }, [2; 32]);
        let proof = token.proof(Prover::Other, &hello, &nonce);
        assert!(token.verify(Prover::Other, &hello, &nonce, &proof));
        assert!(!other.verify(Prover::Other, &hello, &nonce, &proof));
        assert!(!token.verify(Prover::Root, &hello, &nonce, &proof));
        assert!(!token.verify(Prover::Other, &hello, &[3; 32], &proof));
        assert!(!token.verify(Prover::Other, &hello, &nonce, &proof[1..]));
        let changed = [
            Hello { rank: 2, ..hello.clone() },
            Hello { job: "another".into(), ..hello.clone() },
            Hello { nonce: Some([4; 32]), ..hello },
        ];
        assert!(changed.iter().all(|hello| !token.verify(Prover::Other, hello, &nonce, &proof)));
        assert_eq!(format!("{token:?}"), "Token");
        assert_ne!(Token::random().unwrap(), Token::random().unwrap());
    }
}
