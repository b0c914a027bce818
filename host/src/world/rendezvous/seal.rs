//! Authentication codes of frames. Once both ends of a connection have proved that they have the
//! job's token, every frame has one, by a key that only this connection and direction has, and by
//! the frame's number, so that a relay can forge, change, omit or repeat none of them.

use hmac::{Hmac, Mac};
use sha2::Sha256;

/// The number of bytes of a code, which follows the payload.
pub(super) const CODE: usize = 32;

/// The key of one direction, and how many frames it has sealed.
#[derive(Clone)]
pub(super) struct Seal {
    key: Hmac<Sha256>,
    number: u64,
}

impl Seal {
    pub(super) fn new(key: &[u8; 32]) -> Self {
        let key = Hmac::new_from_slice(key).expect("a key of HMAC may have any length");
        Self { key, number: 0 }
    }

    /// Returns the code of the next frame.
    pub(super) fn code(&mut self, head: &[u8], payload: &[&[u8]]) -> [u8; CODE] {
        self.next(head, payload).finalize().into_bytes().into()
    }

    /// Returns whether this is the code of the next frame, in a time that does not depend on it.
    pub(super) fn verify(&mut self, head: &[u8], payload: &[u8], code: &[u8]) -> bool {
        self.next(head, &[payload]).verify_slice(code).is_ok()
    }

    fn next(&mut self, head: &[u8], payload: &[&[u8]]) -> Hmac<Sha256> {
        let mut hash = self.key.clone();
        hash.update(&self.number.to_le_bytes());
        hash.update(head);
        payload.iter().for_each(|piece| hash.update(piece));
        self.number += 1;
        hash
    }
}
