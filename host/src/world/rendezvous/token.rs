//! The job's token: a secret that its ranks have, and strangers do not. Rank 0 and another rank
//! prove to each other that they have it, by keyed hashes of random numbers of both; the token
//! itself is never sent. The keys that seal their later frames come from the same numbers.

use std::fmt;
use std::io;

use hmac::{Hmac, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use super::seal::Seal;

/// A random number that is used once.
pub(crate) type Nonce = [u8; 32];
type Hash = [u8; 32];

/// The fewest characters of a token. A process that knows the job's id can try tokens without rank
/// 0 noticing, as rank 0 proves first that it has the right one.
pub(crate) const MIN_TOKEN: usize = 16;

/// A job's token.
#[derive(Clone, PartialEq)]
pub(crate) struct Token(Vec<u8>);

/// Rank 0's answer to a [`Hello`](super::wire::Hello) with a nonce.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Challenge {
    pub nonce: Nonce,
    /// Proves that rank 0 has the token.
    pub proof: Hash,
}

/// The side that proves.
#[derive(Clone, Copy)]
pub(crate) enum Prover {
    Root = 0,
    Other = 1,
}

impl Token {
    /// Returns the token in a text, without the white space around it.
    ///
    /// # Errors
    ///
    /// If it has fewer than [`MIN_TOKEN`] characters.
    pub(crate) fn new(text: &str) -> Result<Self, String> {
        let text = text.trim();
        match text.chars().count() {
            0 => Err("it is blank".to_owned()),
            few @ 1..MIN_TOKEN => Err(format!(
                "it has {few} characters, a token has at least {MIN_TOKEN}: `openssl rand -hex 32` \
                 makes one"
            )),
            _ => Ok(Self(text.as_bytes().to_vec())),
        }
    }

    /// Returns a new token, as text.
    pub(crate) fn random() -> io::Result<String> {
        Ok(nonce()?.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// Returns the handshake for this token, the bytes of a rank's
    /// [`Hello`](super::wire::Hello) and rank 0's random number.
    pub(crate) fn handshake(&self, hello: &[u8], nonce: &Nonce) -> Handshake {
        let mut hash =
            Hmac::<Sha256>::new_from_slice(&self.0).expect("a key of HMAC may have any length");
        hash.update(nonce);
        // The hello has the other nonce, the job, the rank and the ends of the connection.
        hash.update(hello);
        Handshake(hash)
    }
}

/// The keyed hash by which both ends of a connection prove that they have the token, and seal their
/// later frames.
#[derive(Clone)]
pub(crate) struct Handshake(Hmac<Sha256>);

impl Handshake {
    /// Returns the proof that the prover has the token.
    pub(crate) fn proof(&self, prover: Prover) -> Hash {
        self.hash(prover as u8).finalize().into_bytes().into()
    }

    /// Returns whether this is the [`proof`](Self::proof), in a time that does not depend on it.
    pub(crate) fn verify(&self, prover: Prover, proof: &[u8]) -> bool {
        self.hash(prover as u8).verify_slice(proof).is_ok()
    }

    /// Returns the seal of what `sender` sends after both have proved that they have the token.
    pub(super) fn seal(&self, sender: Prover) -> Seal {
        // Purposes 0 and 1 are the proofs.
        Seal::new(&self.hash(2 + sender as u8).finalize().into_bytes().into())
    }

    fn hash(&self, purpose: u8) -> Hmac<Sha256> {
        self.0.clone().chain_update([purpose])
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
    use super::super::relay::Ends;
    use super::super::tests::hello;
    use super::super::wire::{Hello, json};
    use super::*;

    #[test]
    fn a_proof_is_valid_for_its_token_prover_hello_and_nonce_only() {
        let new = |text| Token::new(text).unwrap();
        let (token, other) = (new("a secret of ranks\n"), new("A secret of ranks"));
        assert_eq!(token, new("a secret of ranks"));
        let (hello, nonce) = (Hello { nonce: Some([1; 32]), ..hello(1, 2) }, [2; 32]);
        let valid = |token: &Token, prover, hello: &Hello, nonce: &Nonce, proof: &[u8]| {
            token.handshake(&json(hello), nonce).verify(prover, proof)
        };
        let proof = token.handshake(&json(&hello), &nonce).proof(Prover::Other);
        assert!(valid(&token, Prover::Other, &hello, &nonce, &proof));
        assert!(!valid(&other, Prover::Other, &hello, &nonce, &proof));
        assert!(!valid(&token, Prover::Root, &hello, &nonce, &proof));
        assert!(!valid(&token, Prover::Other, &hello, &[3; 32], &proof));
        assert!(!valid(&token, Prover::Other, &hello, &nonce, &proof[1..]));
        let changed = [
            Hello { rank: 2, ..hello.clone() },
            Hello { job: "another".into(), ..hello.clone() },
            Hello { nonce: Some([4; 32]), ..hello.clone() },
            Hello { ends: Ends { root: "[::1]:9".parse().unwrap(), ..hello.ends }, ..hello },
        ];
        let proves = |hello| valid(&token, Prover::Other, hello, &nonce, &proof);
        assert!(!changed.iter().any(proves));
        assert_eq!(format!("{token:?}"), "Token");
        assert_ne!(Token::random().unwrap(), Token::random().unwrap());
    }

    #[test]
    fn a_token_that_can_be_guessed_is_refused() {
        assert_eq!(Token::new(" \n").unwrap_err(), "it is blank");
        let short = Token::new(" 15 characters..\n").unwrap_err();
        assert!(short.starts_with("it has 15 characters, a token has at least 16"), "{short}");
        assert!(Token::new("16 characters...").is_ok());
    }
}
