//! [`Projection`]: a product with its bias.

use qgemm_api::{Buffer, BufferRef, Linear, Stream, Workspace};

use crate::error::Error;

/// A product with its bias.
pub struct Projection {
    /// The product.
    pub linear: Linear,
    /// Its bias in f32.
    pub bias: Option<Buffer>,
}

impl Projection {
    /// The product of `m` rows of X. `gamma` is that of its norm, if it has one.
    ///
    /// # Errors
    /// A device error.
    pub fn run<'a>(
        &'a self,
        stream: &Stream,
        m: usize,
        x: impl Into<BufferRef<'a>>,
        d: &'a mut Buffer,
        gamma: Option<&'a Buffer>,
        workspace: &'a mut Workspace,
    ) -> Result<(), Error> {
        let mut args = self.linear.args(x.into(), d).workspace(workspace);
        (args.bias, args.gamma) = (self.bias.as_ref().map(Buffer::view), gamma.map(Buffer::view));
        Ok(self.linear.run(stream, m, args)?)
    }
}
