//! The sums of `wgmma`: a thread that reads them before it has waited for the products finds NaN.

use cuda_std::arch::SumsStep;

use crate::error::Site;
use crate::memory::POISON;

/// A thread's products in flight.
#[derive(Default)]
pub(crate) struct Products {
    /// The number of groups committed so far.
    committed: u32,
    /// The number of groups that the thread has waited for.
    ended: u32,
    in_flight: Vec<InFlight>,
    /// Whether `wgmma.fence` has followed the last point at which the thread had sums in its
    /// registers.
    fenced: bool,
}

/// Sums that are not in the thread's registers yet.
struct InFlight {
    /// The address at which the thread will read them.
    address: usize,
    values: Vec<f32>,
    /// The group of the last product, from 1.
    group: u32,
    /// The last product.
    at: Site,
}

impl Products {
    pub(crate) fn commit(&mut self) {
        self.committed += 1;
    }

    /// Records that the thread has waited until at most `pending` groups have not ended.
    pub(crate) fn wait(&mut self, pending: u32) {
        self.ended = self.ended.max(self.committed.saturating_sub(pending));
    }

    /// Records a `wgmma.fence`.
    pub(crate) fn fence(&mut self) {
        self.fenced = true;
    }

    /// Performs a step of the sums that are at this place in the thread's registers.
    ///
    /// # Errors
    ///
    /// Fails for a product whose sums the thread may have written since the last `wgmma.fence`.
    pub(crate) fn step(
        &mut self,
        sums: &mut [f32],
        step: SumsStep,
        at: Site,
    ) -> Result<(), &'static str> {
        let address = sums.as_ptr().addr();
        let known = self.in_flight.iter().position(|sums| sums.address == address);
        match (step, known) {
            (SumsStep::Begin, Some(index)) => sums.copy_from_slice(&self.in_flight[index].values),
            (SumsStep::Begin, None) if !self.fenced => {
                return Err("a product whose sums are in the thread's registers: `wgmma::fence` \
                            before it is missing");
            }
            (SumsStep::Fence, Some(index)) if self.in_flight[index].group <= self.ended => {
                sums.copy_from_slice(&self.in_flight.swap_remove(index).values);
                self.fenced = false;
            }
            (SumsStep::End, known) => {
                let (values, group) = (sums.to_vec(), self.committed + 1);
                let new = InFlight { address, values, group, at };
                match known {
                    Some(index) => self.in_flight[index] = new,
                    None => self.in_flight.push(new),
                }
                sums.fill(f32::from_bits(POISON));
            }
            // A first product of fenced sums; a fence of sums that are in the registers; or a fence
            // before the wait for the product, after which the thread reads NaN.
            _ => {}
        }
        Ok(())
    }

    /// Ends the thread's products. Returns the line of one whose sums it has not waited for.
    pub(crate) fn end(&mut self) -> Option<Site> {
        std::mem::take(self).in_flight.first().map(|sums| sums.at)
    }
}
